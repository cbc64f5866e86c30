"""What every room stands on: errors, files, processes, progress, and work shared out."""
