//! The lab: real guests on a real KVM, on any host.
//!
//! If the host has no complete KVM, QEMU emulates a whole machine with AMD's virtualization (SVM
//! with nested paging): the outer machine. It boots a distribution's kernel, whose `kvm_amd` works
//! as on hardware, only slower. vmferry and its guests run in this machine, and `lab-agent` runs
//! the scenarios. If the host has a complete KVM, `lab-agent` runs the scenarios on the host
//! itself.
//!
//! | module | content |
//! |---|---|
//! | [`programs`], [`peer`] | programs that a scenario starts on this or the other machine |
//! | [`emulator`] | detection of guests that the emulator lost |
//! | [`death`] | detection of emulator failures that end a machine |
//! | [`pace`] | speed of this machine, and time limits that follow from it |
//! | [`plan`] | request of the host to the agent |
//! | [`record`] | outcome of one scenario |
//! | [`runner`] | run of the scenarios, each in a separate process with a time limit |
//! | [`scenarios`] | scenarios of the lab |
//! | [`violation`] | detection of system calls that vmferry's confinement forbids |
//! | [`guest_report`] | report of a Linux guest |
//! | [`summary`] | records as a table, as JSON, and as JUnit's XML |

#![forbid(unsafe_code)]

pub mod death;
pub mod emulator;
pub mod guest_report;
pub mod pace;
pub mod peer;
pub mod plan;
pub mod programs;
pub mod record;
pub mod runner;
pub mod scenarios;
pub mod summary;
pub mod violation;
