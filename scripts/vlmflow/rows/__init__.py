"""Converts raw rows to training rows, checks them, and accounts for every one."""
