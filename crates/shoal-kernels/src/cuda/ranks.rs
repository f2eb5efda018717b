//! Which of a library's answers proved fastest, kept on disk by GPU and library. The library's first answer is
//! its guess; another of its answers is up to a tenth faster for some products. What was measured once is
//! kept, because another algorithm rounds differently: runs on one machine should not vary with the weather.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use crate::random::key_of;

pub(super) struct Ranks {
    path: Option<PathBuf>,
    /// By the hash of a question's description: the answer to take, from 0.
    known: HashMap<u64, usize>,
}

impl Ranks {
    /// What is known of a kind of question, of a GPU model and of a library with its version. A folder that
    /// cannot be read holds nothing.
    pub(super) fn read(folder: Option<PathBuf>, kind: &str, gpu: &str, library: &str) -> Ranks {
        let plain: String = gpu.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
        let name = format!("{kind}-{}-{library}", plain.to_lowercase());
        let path = folder.map(|folder| folder.join(name));
        let text = path.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let line = |line: &str| {
            let (key, rank) = line.split_once(' ')?;
            Some((u64::from_str_radix(key, 16).ok()?, rank.parse().ok()?))
        };
        Ranks { path, known: text.lines().filter_map(line).collect() }
    }

    pub(super) fn get(&self, question: &str) -> Option<usize> {
        self.known.get(&key_of(question)).copied()
    }

    /// Keeps a measurement. That the disk refuses it is no error: the next start measures again.
    pub(super) fn keep(&mut self, question: &str, rank: usize) {
        let key = key_of(question);
        self.known.insert(key, rank);
        let Some(path) = &self.path else { return };
        let line = format!("{key:016x} {rank}\n");
        // One write of one line: several processes may append.
        let _ = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_read_again_and_noise_is_passed_over() {
        let folder = std::env::temp_dir().join(format!("shoal-ranks-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let read = || Ranks::read(Some(folder.clone()), "products", "NVIDIA X/1", "cublaslt13");
        let mut ranks = read();
        assert_eq!(ranks.get("a"), None);
        ranks.keep("a", 3);
        ranks.keep("b", 0);
        std::fs::write(folder.join("products-nvidia-x-1-cublaslt13"), {
            let text = std::fs::read_to_string(folder.join("products-nvidia-x-1-cublaslt13")).unwrap();
            format!("{text}torn li\n\u{0}\nzz 5\n")
        })
        .unwrap();
        let again = read();
        assert_eq!((again.get("a"), again.get("b"), again.get("c")), (Some(3), Some(0), None));
        std::fs::remove_dir_all(&folder).unwrap();
        let mut nowhere = Ranks::read(None, "products", "X", "cublaslt1");
        nowhere.keep("a", 1);
        assert_eq!(nowhere.get("a"), Some(1));
    }
}
