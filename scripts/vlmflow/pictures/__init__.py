"""The pictures that rows name: found, checked, stored under one name everywhere."""
