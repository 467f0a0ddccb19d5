"""Text, tables, charts, heat maps and pages for people."""
