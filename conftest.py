"""Keep pytest out of the two links at the root: their files are collected inside the package."""

collect_ignore = ["privacy", "protocols"]
