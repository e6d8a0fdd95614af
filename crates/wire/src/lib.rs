//! Bytes to messages of the migration protocol and back: no sockets, no unsafe.
