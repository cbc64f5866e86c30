"""What runs jobs elsewhere and stores their targets there: README.md."""
