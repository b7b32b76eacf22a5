"""What a tensor's step may ask for, the bytes of its payloads, and how ranks compare."""
