//! Where jobs' files may lie. Whoever has the API's token names what controller and workers read and write, so beyond one
//! machine that is bounded: every path of a job has to lie under one of some folders, as it is after links and `..`. It is
//! looked at before anything of it is read.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::error::{CliError, Result};
use crate::job::Job;

/// Folders that all of jobs' files lie under; anywhere if there are none.
#[derive(Clone, Debug)]
pub struct Within {
    folders: Vec<PathBuf>,
}

/// As `shoal up` and `shoal join` are told it.
#[derive(clap::Args)]
pub struct JobsUnder {
    /// Jobs may name files under this folder only; several may be given. Otherwise anywhere while all is on one machine, and
    /// beyond it under the folder that this was started in
    #[arg(long = "jobs-under", value_name = "FOLDER")]
    folders: Vec<PathBuf>,
}

impl JobsUnder {
    /// `address` is where others reach the controller.
    pub fn within(&self, address: IpAddr) -> Result<Within> {
        if !self.folders.is_empty() {
            return Within::under(&self.folders);
        }
        if address.is_loopback() {
            return Ok(Within::anywhere());
        }
        let here = std::env::current_dir().map_err(CliError::at(Path::new(".")))?;
        if here.parent().is_none() {
            let sentence = "jobs of other machines could name every file here, since this was started in /";
            return Err(CliError::said(sentence, "name the folders that they may use: --jobs-under FOLDER"));
        }
        Within::under(&[here])
    }
}

impl Within {
    pub fn anywhere() -> Within {
        Within { folders: Vec::new() }
    }

    pub fn under(folders: &[PathBuf]) -> Result<Within> {
        let real = |folder: &PathBuf| std::fs::canonicalize(folder).map_err(CliError::at(folder));
        Ok(Within { folders: folders.iter().map(real).collect::<Result<_>>()? })
    }

    /// What people should know of it, if there is something.
    pub fn sentence(&self) -> Option<String> {
        (!self.folders.is_empty()).then(|| format!("jobs may name files under {}", self.list()))
    }

    fn list(&self) -> String {
        let folders = self.folders.iter().map(|folder| folder.display().to_string());
        folders.collect::<Vec<String>>().join(", ")
    }

    /// Refuses a job with a path that lies elsewhere.
    pub fn check(&self, file: &Path, text: &str) -> Result {
        if self.folders.is_empty() {
            return Ok(());
        }
        for (key, path) in Job::paths(file, text)? {
            let real = resolved(&path);
            let is_under = |real: &PathBuf| self.folders.iter().any(|folder| real.starts_with(folder));
            if !real.as_ref().is_some_and(is_under) {
                let sentence = format!("{key} is {}, which jobs may not name here", path.display());
                let hint = format!("put it under {}, or start this with another --jobs-under", self.list());
                return Err(CliError::said(sentence, hint));
            }
        }
        Ok(())
    }
}

/// Where a path leads, of which the last parts need not be there yet. None where that cannot be said: it goes up from a
/// folder that is not there, or through a link that leads nowhere yet.
fn resolved(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let (mut there, mut missing) = (path.as_path(), Vec::new());
    loop {
        match std::fs::canonicalize(there) {
            Ok(mut real) => {
                real.extend(missing.iter().rev());
                return Some(real);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if std::fs::symlink_metadata(there).is_ok() {
                    return None;
                }
                missing.push(there.file_name()?);
                there = there.parent()?;
            }
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_of_a_job_is_looked_at_where_it_leads() {
        let outer = tempfile::tempdir().unwrap();
        let (jobs, other) = (outer.path().join("jobs"), outer.path().join("other"));
        for folder in [&jobs, &other] {
            std::fs::create_dir(folder).unwrap();
        }
        std::os::unix::fs::symlink(&other, jobs.join("out")).unwrap();
        std::os::unix::fs::symlink(other.join("not-yet"), jobs.join("dangling")).unwrap();
        std::os::unix::fs::symlink(&jobs, outer.path().join("in")).unwrap();
        let within = Within::under(std::slice::from_ref(&jobs)).unwrap();
        let file = jobs.join("job.toml");
        let text = |train: &str, tokenizer: &str, from: &str, to: &str, eval: &str| {
            format!(
                "[model]\nfrom = \"{from}\"\n[data]\ntrain = \"{train}\"\ntokenizer = \"{tokenizer}\"\nsequence = 8\n\
                 [train]\nglobal_batch = 1\nsteps = 1\n[checkpoint]\nto = \"{to}\"\n\
                 [eval]\ndata = \"{eval}\"\nevery = \"1 steps\"\n"
            )
        };
        let checks = |text: &str| within.check(&file, text).is_ok();
        let inside = outer.path().join("in/model").display().to_string();
        assert!(checks(&text("a.txt", "bytes", &inside, "runs/new/one", "b.txt")));
        #[cfg(feature = "object-store")]
        assert!(checks(&text("a.txt", "bytes", "m", "s3://bucket/run", "b.txt")));
        for elsewhere in
            ["/etc/passwd", "../other/x", "out/x", "dangling", "dangling/x", "nothing/../../other", "..", "/"]
        {
            assert!(!checks(&text(elsewhere, "bytes", "m", "r", "b")), "data.train = {elsewhere}");
            assert!(!checks(&text("a", elsewhere, "m", "r", "b")), "data.tokenizer = {elsewhere}");
            assert!(!checks(&text("a", "bytes", elsewhere, "r", "b")), "model.from = {elsewhere}");
            assert!(!checks(&text("a", "bytes", "m", elsewhere, "b")), "checkpoint.to = {elsewhere}");
            assert!(!checks(&text("a", "bytes", "m", "r", elsewhere)), "eval.data = {elsewhere}");
        }
        let url = format!("file://{}", other.display());
        assert!(!checks(&text("a", "bytes", "m", &url, "b")), "{url}");
        // A job file that lies elsewhere has its runs there, too.
        let default = text("/nowhere", "bytes", "m", "r", "b").replace("[checkpoint]\nto = \"r\"\n", "");
        assert!(within.check(&other.join("job.toml"), &default).is_err());
        assert!(Within::anywhere().check(&file, &text("/etc/passwd", "bytes", "m", "r", "b")).is_ok());
    }
}
