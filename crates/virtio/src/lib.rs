//! Virtio devices behind the virtio-mmio transport (virtio 1.2). Knows guest memory, and neither KVM nor any VMM.
//!
//! | module | what |
//! |---|---|
//! | [`mmio`] | the transport: registers, status machine, features, queues |
//! | [`queue`] | a virtqueue and what a driver puts into it, as far as that can be trusted |
//! | [`signals`] | interrupts and the generation of the configuration |
//! | [`device`] | what a device is |
//! | [`runs`] | guest addresses to pages |
//! | [`balloon`] | the memory balloon |
//! | [`blk`] | disks |
//! | [`rng`] | random numbers |
//! | [`net`] | the network interface |
//!
//! # Who does the work
//! A notification is processed on the thread of the vCPU that wrote the register, before that write returns. For the balloon this
//! is the shortest way: a driver that reports or inflates waits for the answer in any case, the vCPU that frees pays for it, no
//! other thread has to wake, and once all vCPUs are paused no request is half done. What would take too long is done in portions
//! ([`mmio::MmioTransport::work`]), between which the vCPU's thread looks whether it is to pause. A device that waits for a disk or
//! a network hands its requests to threads of its own, which ring its [`device::Doorbell`] when they are done.
//!
//! # Hostile drivers
//! Everything that a driver writes is taken as an attack: registers, rings, descriptors, what lies in buffers. A ring or a chain
//! that cannot be followed stops the device until the driver resets it (`DEVICE_NEEDS_RESET`); a buffer that can be, with content
//! that cannot be, is counted, given back, and otherwise ignored. Nothing panics, no address outside guest memory is touched,
//! nothing is allocated without a bound, and the work of one notification is bounded.
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
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use more of it"))]
mod testing;
