"""Rows of finished runs, their outputs compared, and the page that is made from them."""
