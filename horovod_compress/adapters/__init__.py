"""What all reducers share, whatever their framework is: binding, elastic states, updates, trials."""
