"""Commands that build on the package, which never imports them; each has a file in scripts/."""
