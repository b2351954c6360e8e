"""Text and HTML of every report: each module here turns one kind of value into a page of rows."""
