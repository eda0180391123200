"""The command ``wamlab``: a thin face over the functions a notebook calls."""
