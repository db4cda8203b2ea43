"""What ranks send each other, and which ranks take part."""
