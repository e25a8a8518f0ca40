"""The pool as the streams describe it: a pure fold shared by all who read it."""
