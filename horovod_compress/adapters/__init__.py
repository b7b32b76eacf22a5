"""What all hosts of compressions share, whatever their framework is."""
