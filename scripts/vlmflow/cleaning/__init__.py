"""What a finished workflow no longer needs, and how it is removed."""
