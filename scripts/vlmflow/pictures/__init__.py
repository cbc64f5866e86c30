"""The pictures that rows name: finds them, checks them, and stores them under one name everywhere."""
