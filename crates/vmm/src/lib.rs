//! The reference VMM: vCPUs, memory, boot, serial.
