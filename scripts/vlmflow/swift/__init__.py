"""ms-swift in processes of its own: its arguments, its environment, and what it says."""
