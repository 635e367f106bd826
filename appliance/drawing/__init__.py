"""Page templates, drawings, and numbers as text: for compile reports, the page, and commands."""
