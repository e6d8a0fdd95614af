//! The network interface's saved state.

use super::device::Net;
use super::{FramePort, MTU_MIN, Mac, NetOptions};
use crate::device::QueueSpec;
use serde::{Deserialize, Serialize};

/// The network interface, apart from its registers and queues. Frames are not part of it: those that wait at the host's side, and no
/// driver's buffer is half used when it is saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetSaved {
    /// Its address.
    pub mac: [u8; 6],
    /// The largest packet, as the guest was told.
    pub mtu: u16,
    /// The driver has been asked to announce the guest and has not said that it did.
    pub announce: bool,
}

impl NetSaved {
    pub(super) fn of<P: FramePort>(net: &Net<P>) -> Self {
        let NetOptions { mac, mtu } = net.shared().options();
        Self { mac: mac.bytes(), mtu, announce: net.shared().status().announce }
    }

    /// Takes it up: the guest's address is what it was, whatever this side was made with.
    pub(super) fn load<P: FramePort>(
        &self,
        net: &mut Net<P>,
        active: Option<(u128, &[QueueSpec])>,
    ) -> Result<bool, String> {
        let mac = Mac::new(self.mac).map_err(|error| error.to_string())?;
        if self.mtu < MTU_MIN {
            return Err(format!("packets of at most {} bytes: no network has such", self.mtu));
        }
        let (shared, here) = (net.shared(), net.shared().options());
        if here.mtu < self.mtu {
            tracing::warn!(
                here = here.mtu,
                guest = self.mtu,
                "the guest sends larger packets than this host's interface carries; give the tap the same MTU on both hosts"
            );
        }
        shared.set_options(NetOptions { mac, mtu: self.mtu });
        shared.set_announce(self.announce);
        shared.set_features(active.unwrap_or_default().0);
        Ok(false)
    }
}
