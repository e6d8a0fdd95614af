//! The engine over real sockets, with a toy VM on both sides: moves, failures, broken links, strangers and liars.

mod moves;
mod rig;
mod toy;
