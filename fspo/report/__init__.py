"""Run folders to figures, tables and one static HTML page. The only part of the package that imports matplotlib."""
