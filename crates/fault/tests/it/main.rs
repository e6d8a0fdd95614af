//! Tests with missing and write-protected pages of real memory: faults, huge pages, and the end of
//! a guest that may sleep on them.

mod faults;
mod huge;
#[path = "../../../sys/tests/pool/mod.rs"]
mod pool;
mod protection;
mod rig;
mod slot;
