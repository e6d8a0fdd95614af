//! The lab: real guests on a real KVM, on any host.
//!
//! Where a host has no full KVM, QEMU emulates a whole machine with AMD's virtualization (SVM with nested paging): the outer
//! machine. It boots a distribution's kernel whose `kvm_amd` then is as real as on hardware, only slower. In it vmferry runs, with
//! its guests, and `lab-agent` takes it through the scenarios. Where the host has full KVM, `lab-agent` does the same right there.
//!
//! | module | what it is |
//! |---|---|
//! | [`desk`], [`peer`] | programs that a scenario starts, here or on the other machine |
//! | [`emulator`] | whether the emulator itself lost a guest |
//! | [`death`] | whether the emulator itself lost a machine |
//! | [`pace`] | time limits that follow from how fast this machine is |
//! | [`plan`] | what the host asks the agent to do |
//! | [`record`] | how one scenario ended |
//! | [`runner`] | one scenario after the other, each in a process of its own, within its time |
//! | [`scenarios`] | what is tried |
//! | [`violation`] | whether a vmferry did what its confinement forbids |
//! | [`told`] | what a Linux guest tells of itself |
//! | [`summary`] | the records as a table, as JSON, as JUnit's XML |

#![forbid(unsafe_code)]

pub mod death;
pub mod desk;
pub mod emulator;
pub mod pace;
pub mod peer;
pub mod plan;
pub mod record;
pub mod runner;
pub mod scenarios;
pub mod summary;
pub mod told;
pub mod violation;
