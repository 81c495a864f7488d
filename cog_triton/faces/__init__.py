"""The faces that users meet; each calls ``generation.generate``."""
