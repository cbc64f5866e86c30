"""What all other folders use: errors, files, processes, progress, and shared work."""
