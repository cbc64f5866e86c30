"""`make doctor`: checks of the cluster, from outside and from inside its pods."""
