//! Placeholders for encryption in a build without the feature `tls`.
//!
//! The types have no values. Code that needs a value is never reached, so the rest of the module
//! needs no condition on the feature.

use super::iobuf::IoBuf;
use super::raw::{RawStream, SendError};
use std::io;
use std::time::{Duration, Instant, SystemTime};

#[derive(Debug, Clone)]
pub(crate) enum Tls {}

#[derive(Debug)]
pub(super) enum Records {}

impl Records {
    pub(super) fn connect(tls: &Tls, _: Option<&str>, _: &RawStream, _: Duration) -> io::Result<Self> {
        match *tls {}
    }

    pub(super) fn accept(tls: &Tls, _: &RawStream, _: Duration) -> io::Result<Self> {
        match *tls {}
    }

    pub(super) fn peer(&self) -> &[u8] {
        match *self {}
    }

    pub(super) fn send(
        &self,
        _: &mut [IoBuf<'_>],
        _: impl FnMut(&[u8]) -> Result<(), SendError>,
    ) -> Result<(), SendError> {
        match *self {}
    }

    pub(super) fn receive(&self, _: &mut [IoBuf<'_>], _: &RawStream, _: Option<Instant>) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn receive_some(&self, _: &mut [u8], _: &RawStream) -> io::Result<usize> {
        match *self {}
    }

    pub(super) fn receive_stamped(&self, _: &mut [u8], _: &RawStream) -> io::Result<Option<SystemTime>> {
        match *self {}
    }

    pub(super) fn has_input(&self) -> bool {
        match *self {}
    }
}
