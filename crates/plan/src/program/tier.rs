//! Where a buffer can be that is not on the device.

/// Memory outside the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The memory of the host.
    Host,
    /// A disk.
    Disk,
}

impl Tier {
    /// All tiers, in the order of their indices.
    pub const ALL: [Tier; 2] = [Tier::Host, Tier::Disk];

    /// The name in texts: `host` or `disk`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Host => "host",
            Tier::Disk => "disk",
        }
    }
}
