use shoal_model::{Chain, Precision};

use crate::catalogue::Kind;
use crate::profile::DeviceProfile;

/// A profile by arithmetic.
pub fn device(chain: &Chain, kind: &Kind, precision: Precision, sequence: usize) -> DeviceProfile {
    todo!("{chain:?}{kind:?}{precision:?}{sequence}")
}

pub(crate) fn update_seconds(kind: &Kind, precision: Precision) -> f64 {
    todo!("{kind:?}{precision:?}")
}
