//! The command end to end: real processes, real sockets, and a guest that must be the same afterwards.

mod balloon;
mod check;
mod ends;
mod failures;
mod generate;
mod moves;
mod plan;
mod postcopy;
mod support;
mod terminal;
mod usage;
mod watching;
