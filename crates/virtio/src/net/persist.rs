//! The network interface's saved state.

use super::device::Net;
use super::{FramePort, MTU_MIN, Mac, NetOptions};
use crate::device::QueueSpec;
use serde::{Deserialize, Serialize};

/// State of a network interface, apart from its registers and queues. Frames are not part of the
/// state: they wait at the host's end. No buffer of the driver is partly used when the state is
/// saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetSaved {
    /// Address of the interface.
    pub mac: [u8; 6],
    /// Largest packet in bytes, as the guest was told.
    pub mtu: u16,
    /// True if the driver has been asked to announce the guest and has not confirmed it.
    pub announce: bool,
}

impl NetSaved {
    pub(super) fn of<P: FramePort>(net: &Net<P>) -> Self {
        let NetOptions { mac, mtu } = net.shared().options();
        Self { mac: mac.bytes(), mtu, announce: net.shared().status().announce }
    }

    /// Loads this state. The guest keeps its address, whatever address the interface was created
    /// with.
    pub(super) fn load<P: FramePort>(
        &self,
        net: &mut Net<P>,
        active: Option<(u128, &[QueueSpec])>,
    ) -> Result<bool, String> {
        let mac = Mac::new(self.mac).map_err(|error| error.to_string())?;
        if self.mtu < MTU_MIN {
            return Err(format!("a largest packet of {} bytes is below the minimum of a network", self.mtu));
        }
        let (shared, here) = (net.shared(), net.shared().options());
        if here.mtu < self.mtu {
            tracing::warn!(
                here = here.mtu,
                guest = self.mtu,
                "the guest sends larger packets than this host's interface carries; set the same MTU on the tap of both hosts"
            );
        }
        shared.set_options(NetOptions { mac, mtu: self.mtu });
        shared.set_announce(self.announce);
        shared.set_features(active.unwrap_or_default().0);
        Ok(false)
    }
}
