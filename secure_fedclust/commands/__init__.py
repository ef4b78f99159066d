"""What `secure_fedclust.cli` offers, one file for commands that belong together."""
