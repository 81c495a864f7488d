"""What builds on the package, and is never imported by it: commands with a file each in scripts/."""
