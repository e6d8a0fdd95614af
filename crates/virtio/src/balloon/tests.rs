//! Tests of the balloon.
