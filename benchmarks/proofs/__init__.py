"""Campaigns of many cases, each run once; the tests hold samples of them."""
