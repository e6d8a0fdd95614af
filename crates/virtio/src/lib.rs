//! Virtio devices with the virtio-mmio transport (virtio 1.2). This crate accesses guest memory,
//! but depends neither on KVM nor on a VMM.
//!
//! | module | content |
//! |---|---|
//! | [`mmio`] | the transport: registers, status machine, features, queues |
//! | [`queue`] | a virtqueue and its checked buffers |
//! | [`signals`] | interrupts and the generation of the configuration |
//! | [`device`] | the interface of a device |
//! | [`runs`] | conversion of guest addresses to pages |
//! | [`balloon`] | the memory balloon |
//! | [`blk`] | disks |
//! | [`rng`] | random numbers |
//! | [`net`] | the network interface |
//!
//! # Threads
//! A notification is processed on the thread of the vCPU that wrote the register, before that write
//! returns. This is the shortest path for the balloon, for these reasons:
//! - A driver that reports or inflates waits for the answer in any case.
//! - The vCPU that frees the pages also bears the cost, and no other thread has to wake up.
//! - When all vCPUs are paused, no request is half done.
//!
//! Long work is done in portions ([`mmio::MmioTransport::work`]), between which the vCPU thread
//! checks whether it has to pause. A device that waits for a disk or a network passes its requests
//! to its own threads, which ring its [`device::Doorbell`] when the requests are done.
//!
//! # Hostile drivers
//! Nothing that a driver writes is trusted: registers, rings, descriptors, and the content of
//! buffers. An invalid ring or chain stops the device until the driver resets it
//! (`DEVICE_NEEDS_RESET`). A valid buffer with invalid content is counted, given back, and
//! otherwise ignored. No input causes a panic or an access outside guest memory. All allocations
//! are bounded, and so is the work for one notification.
#![forbid(unsafe_code)]

pub mod balloon;
pub mod blk;
pub mod device;
mod figures;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
pub mod mmio;
pub mod net;
pub mod queue;
pub mod rng;
pub mod runs;
pub mod signals;
#[cfg(any(test, feature = "hostile"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use more of this module"))]
mod testing;
