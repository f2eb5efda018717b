//! Kernels from source to machine code: compiled by NVRTC at the first start on a kind of GPU, kept on disk
//! by content from then on. The build needs no CUDA toolkit, the kernels need no headers.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use cudarc::nvrtc::{result, sys};

use crate::device::{DeviceError, Result};
use crate::random::key_of;

/// What every unit starts with.
const COMMON: &str = include_str!("kernels/common.cu");

/// The kernels in parts, each compiled side by side with others and loaded as a module of its own: the first
/// start on a kind of GPU waits for the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Unit {
    Elementwise,
    Norm,
    Embedding,
    Loss,
    Optimizer,
    /// What only models of images use.
    Images,
    /// What convolutions need beside products and cuDNN.
    Convolution,
    /// What only convolutional models use.
    Pixels,
    /// Plain attention.
    Attention,
    /// Attention on tensor cores, which takes the compiler longest.
    FlashBf16,
    FlashF16,
}

impl Unit {
    /// What every training step uses.
    pub(super) const FIRST: [Unit; 5] =
        [Unit::Elementwise, Unit::Norm, Unit::Embedding, Unit::Loss, Unit::Optimizer];

    /// The unit that holds a kernel.
    pub(super) fn of(symbol: &str) -> Unit {
        let starts = |names: &[&str]| names.iter().any(|name| symbol.starts_with(name));
        match symbol {
            _ if starts(&["flash_"]) && symbol.contains("_bf16") => Unit::FlashBf16,
            _ if starts(&["flash_"]) => Unit::FlashF16,
            _ if starts(&["attention_", "query_gradient_", "key_value_gradient_"]) => Unit::Attention,
            _ if starts(&["norm", "column_sums", "add_rows"]) => Unit::Norm,
            _ if starts(&["embed", "token_", "position_", "sort_", "add_token_"]) => Unit::Embedding,
            _ if starts(&["cross_entropy", "add_losses"]) => Unit::Loss,
            _ if starts(&["image_", "class_loss"]) => Unit::Images,
            _ if starts(&["convolution_"]) => Unit::Convolution,
            _ if starts(&["pixel_"]) => Unit::Pixels,
            _ if starts(&["squares", "add_parts", "adamw", "sgd"]) => Unit::Optimizer,
            _ => Unit::Elementwise,
        }
    }

    fn source(self) -> String {
        let (defined, source) = match self {
            Unit::Elementwise => ("", include_str!("kernels/elementwise.cu")),
            Unit::Norm => ("", include_str!("kernels/norm.cu")),
            Unit::Embedding => ("", include_str!("kernels/embedding.cu")),
            Unit::Loss => ("", include_str!("kernels/loss.cu")),
            Unit::Optimizer => ("", include_str!("kernels/optimizer.cu")),
            Unit::Images => ("", include_str!("kernels/images.cu")),
            Unit::Convolution => ("", include_str!("kernels/convolution.cu")),
            Unit::Pixels => ("", include_str!("kernels/pixels.cu")),
            Unit::Attention => ("", include_str!("kernels/attention.cu")),
            Unit::FlashBf16 => ("#define FLASH_OF_BF16\n", include_str!("kernels/flash.cu")),
            Unit::FlashF16 => ("", include_str!("kernels/flash.cu")),
        };
        [defined, COMMON, source].concat()
    }
}

/// Machine code (or PTX) of one unit for a GPU, ready for the driver.
pub(super) struct Image {
    pub(super) unit: Unit,
    pub(super) bytes: Vec<u8>,
    /// Where it is kept.
    path: Option<PathBuf>,
    /// It came from the disk.
    pub(super) cached: bool,
    target: String,
}

impl Image {
    /// Whether the units that every start needs are on the disk already.
    pub(super) fn are_kept(capability: (i32, i32)) -> Result<bool> {
        Ok(Image::look_up(capability, &Unit::FIRST)?.iter().all(|image| image.cached))
    }

    /// Units as the disk has them; those it lacks are empty.
    fn look_up(capability: (i32, i32), units: &[Unit]) -> Result<Vec<Image>> {
        let compiler = Compiler::find()?;
        let target = compiler.target(capability)?;
        let (major, minor) = compiler.version;
        let look_up = |unit: &Unit| {
            let key = key_of(&unit.source());
            let name = format!("{unit:?}-{target}-nvrtc{major}.{minor}-{key:016x}").to_lowercase();
            let path = cache_folder().map(|folder| folder.join(name));
            let kept = path.as_ref().and_then(|path| std::fs::read(path).ok());
            let bytes = kept.filter(|bytes| !bytes.is_empty());
            let cached = bytes.is_some();
            Image { unit: *unit, bytes: bytes.unwrap_or_default(), path, cached, target: target.clone() }
        };
        Ok(units.iter().map(look_up).collect())
    }

    /// Units for a compute capability, compiled where the disk has none.
    pub(super) fn all(capability: (i32, i32), units: &[Unit]) -> Result<Vec<Image>> {
        let images = Image::look_up(capability, units)?;
        std::thread::scope(|scope| {
            let build = |image: Image| scope.spawn(|| if image.cached { Ok(image) } else { image.fresh() });
            let builds: Vec<_> = images.into_iter().map(build).collect();
            let join = |build: std::thread::ScopedJoinHandle<Result<Image>>| {
                build.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            builds.into_iter().map(join).collect()
        })
    }

    /// Compiled anew, and kept.
    pub(super) fn fresh(&self) -> Result<Image> {
        let image = Image {
            unit: self.unit,
            bytes: compile(&self.unit.source(), &self.target)?,
            path: self.path.clone(),
            cached: false,
            target: self.target.clone(),
        };
        image.keep();
        Ok(image)
    }

    /// Writes the image beside its place and moves it there. A cache that cannot be written is no error:
    /// the next start compiles again.
    fn keep(&self) {
        let Some(path) = &self.path else { return };
        let beside = path.with_extension(format!("part{}", std::process::id()));
        let written = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&beside, &self.bytes))
            .and_then(|()| std::fs::rename(&beside, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
    }
}

/// Where what was made for this machine is kept.
pub(super) fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("shoal"))
}

fn failed(call: &'static str, error: result::NvrtcError) -> DeviceError {
    DeviceError::Compile { call, said: format!("{:?}", error.0) }
}

/// NVRTC as found on this machine.
struct Compiler {
    version: (i32, i32),
}

impl Compiler {
    fn find() -> Result<Compiler> {
        // SAFETY: only asks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoLibrary { library: "libnvrtc.so", part: "the kernel compiler NVRTC" });
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|error| failed("nvrtcVersion", error))?;
        Ok(Compiler { version: (major, minor) })
    }

    /// The target to compile for: the GPU's own architecture, or, where this NVRTC is older than the GPU,
    /// the newest it knows as PTX for the driver to finish.
    fn target(&self, (major, minor): (i32, i32)) -> Result<String> {
        let own = 10 * major + minor;
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }
            .result()
            .map_err(|error| failed("nvrtcGetNumSupportedArchs", error))?;
        let mut known = vec![0; count.max(0) as usize];
        // SAFETY: writes as many integers as it said.
        unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }
            .result()
            .map_err(|error| failed("nvrtcGetSupportedArchs", error))?;
        if known.contains(&own) {
            return Ok(format!("sm_{own}"));
        }
        match known.into_iter().filter(|arch| *arch < own).max() {
            Some(arch) => Ok(format!("compute_{arch}")),
            None => Err(DeviceError::OldGpu { capability: own, nvrtc: self.version }),
        }
    }
}

/// Owns a program until it is compiled and read.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `compile`, destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn compile(source: &str, target: &str) -> Result<Vec<u8>> {
    let source = CString::new(source).expect("the kernels' source has no zero byte");
    let program = result::create_program(&source, Some(c"shoal_kernels.cu"))
        .map(Program)
        .map_err(|error| failed("nvrtcCreateProgram", error))?;
    let options = [format!("--gpu-architecture={target}"), "--std=c++17".to_owned()];
    // SAFETY: the program is alive.
    if let Err(error) = unsafe { result::compile_program(program.0, &options) } {
        // SAFETY: the program is alive.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let said = format!("{:?} for {target}: {}", error.0, text(&log));
        return Err(DeviceError::Compile { call: "nvrtcCompileProgram", said });
    }
    if target.starts_with("compute_") {
        // SAFETY: the program was compiled. PTX ends in a zero byte, as the driver wants it.
        let ptx = unsafe { result::get_ptx(program.0) }.map_err(|error| failed("nvrtcGetPTX", error))?;
        return Ok(ptx.into_iter().map(|byte| byte as u8).collect());
    }
    let mut size = 0;
    // SAFETY: the program was compiled; writes one number.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }
        .result()
        .map_err(|error| failed("nvrtcGetCUBINSize", error))?;
    let mut bytes = vec![0u8; size];
    // SAFETY: writes as many bytes as it said.
    unsafe { sys::nvrtcGetCUBIN(program.0, bytes.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| failed("nvrtcGetCUBIN", error))?;
    Ok(bytes)
}

/// A log up to its zero byte.
fn text(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|byte| *byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or(String::new(), |log| log.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The architectures we promise, as far as this machine's NVRTC knows them (13 dropped what came before sm_75).
    #[test]
    fn the_kernels_compile_for_every_architecture() {
        let Ok(compiler) = Compiler::find() else {
            eprintln!("skipped: no NVRTC on this machine");
            return;
        };
        let later =
            [Unit::Images, Unit::Convolution, Unit::Pixels, Unit::Attention, Unit::FlashBf16, Unit::FlashF16];
        let units: Vec<Unit> = later.into_iter().chain(Unit::FIRST).collect();
        for capability in [(6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)] {
            match compiler.target(capability) {
                Ok(target) if target.starts_with("sm_") => std::thread::scope(|scope| {
                    for unit in &units {
                        let target = &target;
                        scope.spawn(move || {
                            let started = std::time::Instant::now();
                            let bytes = compile(&unit.source(), target)
                                .unwrap_or_else(|error| panic!("{unit:?}: {error}"));
                            let (size, time) = (bytes.len(), started.elapsed());
                            eprintln!("{target}, {unit:?}: {size} bytes of machine code in {time:.1?}");
                        });
                    }
                }),
                _ => eprintln!("{capability:?}: not known to NVRTC {:?}", compiler.version),
            }
        }
    }
}
