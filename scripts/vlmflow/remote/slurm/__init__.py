"""Runs each job of the workflow as a job of Slurm."""
