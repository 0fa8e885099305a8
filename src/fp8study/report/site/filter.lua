-- What Quarto adds to pandoc's Markdown: numbered figures and tables, references.
-- What it cannot do it refuses: one line on stderr, with the thing in question in backticks.

local names = { fig = "Figure", tbl = "Table" }
local numbers = {} -- label: number
local counts = { fig = 0, tbl = 0 }

local function refuse(text)
  io.stderr:write(text, "\n")
  os.exit(1)
end

local function kind_of(label)
  local kind = label:match("^(%l%l%l)%-")
  return names[kind] and kind
end

-- A table that is wider than the screen scrolls by itself, also with the keyboard.
local function scrolling(blocks, key, value)
  -- Pairs, since the order of a Lua table changes from run to run.
  local attributes = { { "tabindex", "0" }, { "role", "region" }, { key, value } }
  return pandoc.Div(blocks, pandoc.Attr("", { "table-scroll" }, attributes))
end

-- A div with such a label ends with its caption.
local function div(el)
  local label = el.identifier
  local kind = kind_of(label)
  if kind then
    local caption = el.content:remove()
    if not caption or caption.t ~= "Para" or #el.content == 0 then
      refuse("`" .. label .. "` needs a caption: one paragraph, the last in its div.")
    end
    if numbers[label] then
      refuse("label `" .. label .. "` is used twice; give each its own.")
    end
    counts[kind] = counts[kind] + 1
    numbers[label] = tostring(counts[kind])
    local number = names[kind] .. "\u{a0}" .. numbers[label] .. ":"
    local words = pandoc.List({ pandoc.Str(number), pandoc.Space() }) .. caption.content
    local numbered = pandoc.Plain(words)
    if kind == "fig" then
      return pandoc.Figure(el.content, { long = { numbered } }, pandoc.Attr(label, { "figure" })),
        false
    end
    -- pandoc writes the caption of a figure below it; that of a table belongs above.
    local html = '<figure id="%s" class="table-float">\n<figcaption id="%s-caption">'
    return {
      pandoc.RawBlock("html", html:format(label, label)),
      numbered,
      pandoc.RawBlock("html", "</figcaption>"),
      scrolling(el.content, "aria-labelledby", label .. "-caption"),
      pandoc.RawBlock("html", "</figure>"),
    }, false
  end
  for key in pairs(el.attributes) do
    refuse("div attribute `" .. key .. "` is not supported; remove it.")
  end
  for _, class in ipairs(el.classes) do
    refuse("div class `." .. class .. "` is not supported; remove it.")
  end
end

local function written_table(el)
  refuse("a table in Markdown (`" .. el.identifier .. "`) is not supported; show it by a cell.")
end

local function html_table(el)
  if el.format == "html" and el.text:find("<table") then
    return scrolling({ el }, "aria-label", "Table"), false
  end
end

local function references(el)
  local links = pandoc.List()
  for _, citation in ipairs(el.citations) do
    local label = citation.id
    if citation.mode ~= "AuthorInText" then
      refuse("reference `@" .. label .. "`: write it without brackets and signs around it.")
    end
    if not numbers[label] then
      refuse("`@" .. label .. "` refers to no figure or table of this page; link to another page "
        .. "as [text](page.qmd#" .. label .. "), or write \\@ for the plain sign.")
    end
    local text = names[kind_of(label)] .. "\u{a0}" .. numbers[label]
    links:insert(pandoc.Link(text, "#" .. label, "", pandoc.Attr("", { "quarto-xref" })))
  end
  return links
end

local function link(el)
  el.target = el.target:gsub("^([%w_-]+)%.qmd", "%1.html")
  return el
end

local function image(el)
  refuse("image `" .. el.src .. "` is not supported; show it by a cell.")
end

local function titles(meta)
  local text = pandoc.utils.stringify
  local title, site = text(meta.title), text(meta["site-title"])
  meta.pagetitle = title == site and site or title .. " – " .. site
  meta["description-meta"] = text(meta.subtitle or meta["site-description"])
  return meta
end

return {
  {
    traverse = "topdown",
    Div = div, Table = written_table, RawBlock = html_table,
  },
  { Cite = references, Link = link, Image = image, Meta = titles },
}
