"""From samples to pages: tables, targets, Markdown, pictures, and the figures in the README."""
