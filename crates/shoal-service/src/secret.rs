//! Secrets: random, never printed, compared without telling how much of a guess was right.

use std::fmt;

use ring::rand::{SecureRandom, SystemRandom};

use crate::error::{Error, Result};

/// A bearer token or a join token's secret half.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// So many random bytes, as hexadecimal digits.
    pub fn random(bytes: usize) -> Result<Secret> {
        let mut drawn = vec![0; bytes];
        SystemRandom::new().fill(&mut drawn).map_err(|_| Error::Random)?;
        Ok(Secret(drawn.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    pub fn from_text(text: &str) -> Secret {
        Secret(text.trim().to_owned())
    }

    /// For whom it is meant; never for a log.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// What may be kept in its place to know it again.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(self.0.as_bytes())
    }

    /// BLAKE3's hashes are compared in constant time, and a guess cannot choose its hash.
    pub fn is(&self, guess: &str) -> bool {
        self.hash() == blake3::hash(guess.as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(not shown)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_not_printed_and_known_again() {
        let (secret, other) =
            (Secret::random(16).expect("randomness"), Secret::random(16).expect("randomness"));
        assert!(!format!("{secret:?}").contains(secret.expose()));
        assert!(secret.is(secret.expose()));
        assert!(!secret.is(other.expose()));
        assert!(!secret.is(""));
    }
}
