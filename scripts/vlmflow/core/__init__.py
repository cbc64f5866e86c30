"""What all other folders use: errors, files, accounts, digests, processes and progress."""
