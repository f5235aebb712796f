"""Run folders as tables, plots and a page that opens from disk."""
