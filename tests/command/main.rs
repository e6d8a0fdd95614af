//! The command end to end: real processes, real sockets, and a guest that must be the same afterwards.

mod balloon;
mod check;
mod failures;
mod generate;
mod moves;
mod postcopy;
mod support;
mod usage;
