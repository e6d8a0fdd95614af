//! The command `vmferry`.
fn main() {}
