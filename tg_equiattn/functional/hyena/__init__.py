"""Long convolutions by FFT."""
