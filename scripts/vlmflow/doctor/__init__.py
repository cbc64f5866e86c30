"""What `make doctor` looks at: the cluster from outside, and from inside its pods."""
