//! Page bitmaps: plain and atomic words, and their runs.
