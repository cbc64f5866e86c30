"""What ties the rules to the library: the only Python code here that knows Snakemake."""
