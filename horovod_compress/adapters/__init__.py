"""The parts that all reducers share, whatever the framework: binding, elastic states, updates,
trials."""
